"""All checks of `accel-sft doctor`, in the order in which they are made and shown."""

from accel_sft.tools.doctor import condition, devices, folders, host, operators, packages, ranks
from accel_sft.tools.doctor.check import Check

CHECKS = (
    Check("Machine", "variables", host.environment),
    Check("Machine", "cores", host.cores),
    Check("Machine", "other work", condition.other_work, "watching the cores for a second"),
    Check("Machine", "CPU clock", condition.clock),
    Check("Machine", "CPU quota", condition.quota),
    Check("Machine", "memory", host.memory),
    Check("Machine", "disk", folders.disk),
    Check("Machine", "clock", folders.clock),
    Check("Machine", "open files", host.open_files),
    Check("Software", "versions", packages.versions),
    Check("Software", "tasks", packages.tasks),
    Check("Software", "hub", packages.hub, "asking the hub"),
    Check("Software", "imports", packages.imports, "asking torch and DeepSpeed"),
    Check("Device", "GPU", devices.gpus, "asking the driver"),
    Check("Device", "GPU state", condition.gpus),
    Check("Device", "CUDA", devices.cuda),
    Check("Device", "bf16", devices.bf16),
    Check("DeepSpeed's operators", "compiler", operators.compiler),
    Check("DeepSpeed's operators", "operators", operators.operators),
    Check("DeepSpeed's operators", "folder", folders.shared_operators),
    Check("Ranks", "/dev/shm", host.shared_memory),
    Check("Ranks", "exchange", ranks.reached, "starting ranks that exchange numbers"),
)
"""The first check sets the environment variables of a launch, which all others need."""
