/* rows.c for CPUs with vectors of 16 floats. */
#define WIDE
#include "rows.c"
