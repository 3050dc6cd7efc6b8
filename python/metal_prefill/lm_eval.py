"""Registers the package's models with lm-evaluation-harness; ``python -m metal_prefill.lm_eval`` runs it."""

from metal_prefill.integrations import MetalPrefillLM

__all__ = ["MetalPrefillLM"]

if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
