"""Which kinds of parallel training are supported, whole models, one per process, and how processes are launched."""

import os

REFUSED = {  # what `accelerate launch` sets -> what it stands for
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config (TP, CP or sharding)",
}
REFUSED_TYPES = {"FSDP": "FSDP", "DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM", "TP": "TP"}  # of accelerate


def check_parallelism(distributed_type: str | None = None) -> None:
    """Raise ValueError if accelerate is configured to split a model over processes.

    Args:
        distributed_type: That of an accelerator. Default: what `accelerate launch` has set for this process.
    """
    asked = [name for variable, name in REFUSED.items() if os.environ.get(variable, "").lower() in ("1", "true")]
    if distributed_type in REFUSED_TYPES:
        asked.append(REFUSED_TYPES[distributed_type])
    if asked:
        raise ValueError(
            f"every process must hold the whole model, got accelerate configured for {asked[0]}: launch with "
            "`torchrun --nproc_per_node NUM -m kairostep ...` or `accelerate launch --multi_gpu -m kairostep ...`, "
            "which override it; docs/several_gpus.md says up to which size that carries"
        )


def launched(command: str, num_processes: int) -> str:
    """Return the line that runs a command of kairostep again, in words, with the launcher that was used."""
    if int(os.environ.get("LOCAL_WORLD_SIZE", num_processes)) < num_processes:
        return "the same command on every machine"
    if num_processes == 1:
        return command
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and "ACCELERATE_MIXED_PRECISION" not in os.environ
    launch = (
        "torchrun --standalone --nproc_per_node" if by_torchrun else "accelerate launch --multi_gpu --num_processes"
    )
    return f"{launch} {num_processes} -m {command}"
