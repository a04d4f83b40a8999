"""The errors a user can cause. A front door prints the message alone, without a traceback, and exits with `exit_code`.

Everything else that is raised is a bug of ours and keeps its traceback.
"""


class UserError(Exception):
    """Something outside tpspec is wrong: a file, an option, a model, the machine. The message says what is right."""

    exit_code = 2


class OutOfMemory(UserError):
    """A shard, a cache or a batch does not fit where it was placed."""

    exit_code = 3


class WorldFailure(UserError):
    """A rank died, hung or diverged; the world ends together."""

    exit_code = 4


class Unread(UserError):
    """Whoever read what is printed has gone, and wants no more: nothing is wrong, and nothing is said."""

    exit_code = 141  # what a shell says of a program that wrote to nobody


EXIT_CODES = {error.exit_code: error for error in (UserError, OutOfMemory, WorldFailure)}
