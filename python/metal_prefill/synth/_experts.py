"""Shape of synthetic feed-forwards with experts."""

from dataclasses import dataclass

from metal_prefill.files._metadata_keys import MAX_INT


@dataclass(frozen=True)
class ExpertShape:
    """Shape of feed-forwards with experts.

    Attributes
    ----------
    count
        Number of experts of a layer.
    used
        Number of experts that a token goes through, at most `count`.
    ffn
        Inner width of an expert.
    shared
        Inner width of an additional expert for all tokens; 0 for none.
    dense_layers
        Number of first layers with a dense feed-forward.
    """

    count: int
    used: int
    ffn: int
    shared: int = 0
    dense_layers: int = 0


def check_experts(experts: ExpertShape) -> None:
    """Raise ValueError if a shape is inconsistent; the message names the field."""
    for name, least in (("count", 1), ("used", 1), ("ffn", 1), ("shared", 0), ("dense_layers", 0)):
        if not least <= getattr(experts, name) <= MAX_INT:
            raise ValueError(f"experts {name} {getattr(experts, name)}: must be in {least}..{MAX_INT}")
    if experts.used > experts.count:
        raise ValueError(f"experts used {experts.used}: must be at most count {experts.count}")
