"""Makes the environment of a launch's rank as the launcher does."""

from accelerate.commands import launch as launcher
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env, prepare_simple_launcher_cmd_env


def environment_of_a_rank(config_file, *flags):
    """The environment variables that Accelerate's own launcher would give a rank; nothing is started."""
    args = launcher.launch_command_parser().parse_args(["--config_file", str(config_file), *flags, "train.py"])
    args, defaults, precision_from_file = launcher._validate_launch_command(args)
    if args.use_deepspeed and not args.cpu:
        fields = [*defaults.deepspeed_config, *(["mixed_precision"] if precision_from_file else [])]
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        return prepare_deepspeed_cmd_env(args)[1]
    if (args.use_fsdp or args.use_megatron_lm or args.multi_gpu) and not args.cpu:
        return prepare_multi_gpu_env(args)
    return prepare_simple_launcher_cmd_env(args)[1]
