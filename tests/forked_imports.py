"""What a command line imports, in its order."""

from accel_sft.launch.environment import prepare_environment

prepare_environment()

import accel_sft.judge  # noqa: E402
import accel_sft.train  # noqa: E402, F401
