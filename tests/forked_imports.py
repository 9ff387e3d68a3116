"""What a command line imports, in its order."""

from accel_sft.launch.environment import prepare_environment

prepare_environment()

import accel_sft.commands.evaluate  # noqa: E402
import accel_sft.commands.train  # noqa: E402, F401
