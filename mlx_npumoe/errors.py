"""The one family of errors a user can meet. Each message says what is wrong, where, and what to do."""


class NpumoeError(Exception):
    """Base of every error this package raises on purpose; the commands print it as one sentence and exit 1."""


class UsageError(NpumoeError):
    """A wrong argument or flag value; the commands exit 2."""


class ModelError(NpumoeError):
    """The model cannot be read, has no experts we can replace, or does not fit what was prepared."""


class PreparedError(NpumoeError):
    """A Prepared folder, profile or plan is missing, damaged, of another model or of another schema."""


class ProgramError(NpumoeError):
    """A Core ML program cannot be built, breaks a rule of the Neural Engine, or computes the wrong thing."""


class DeviceError(NpumoeError):
    """A device cannot load or run a program; the engine answers by running the experts locally."""


class InputError(DeviceError):
    """The rows given to a device were not finite: no fault of the device."""
