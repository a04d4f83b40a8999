"""What runs on CUDA cards alone: kernels of ours, in Triton, and their host sides. Imported there only."""
