"""The command line: ``python -m metal_prefill`` and ``metal-prefill``."""

import sys


def main() -> int:
    """Run the command line and return its exit code, also if Ctrl-C comes while its modules are imported."""
    try:
        from metal_prefill import cli

        return cli.main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130  # as `cli` does; it may not be imported


if __name__ == "__main__":
    sys.exit(main())
