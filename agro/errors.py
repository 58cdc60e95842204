"""What agro reports to the person who runs it, besides results."""


class Refused(ValueError):
    """The request, the configuration or the data can't be used as they are.

    The message says what was expected, what came, which record, and what to do. The command line prints it
    without a traceback and exits with 2.
    """


class Unwritable(Refused):
    """The disk is full, or a file or folder can only be read. What was written before is intact."""


class AgroWarning(UserWarning):
    """A setting was skipped or a figure can't be trusted; the run continues."""


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM: a checkpoint is written, and the run can be resumed."""
