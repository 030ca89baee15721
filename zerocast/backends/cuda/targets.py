"""Whether the machine code in the extension runs on a GPU."""

import torch


def why_no_kernels(targets: str, device: torch.device) -> str | None:
    """None when one of the built targets, such as "90a 100f 90+PTX", serves this GPU, else the reason.

    "90a" is for compute capability 9.0 alone, "100f" for 10.x, "80" for 8.x; PTX is for that capability and all above.
    """
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if any(_serves(target, capability) for target in targets.split()):
        return None
    return (
        f"zerocast.backends._C was built for the targets {targets}, none of which runs on {torch.cuda.get_device_name(device)}, "
        f"compute capability {capability[0]}.{capability[1]}: install again on this machine, or with ZEROCAST_CUDA=1"
    )


def _serves(target: str, capability: tuple[int, int]) -> bool:
    number, _, ptx = target.partition("+")
    built = divmod(int(number.rstrip("af")), 10)
    if number.endswith("a"):
        return capability == built
    return capability >= built and (bool(ptx) or capability[0] == built[0])
