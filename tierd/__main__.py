"""`tierd` and `python -m tierd`: the command line, which is the daemon's."""


def main() -> int:
    """Run one command; returns its exit status."""
    from tierd.daemon.cli import main as command

    return command()


if __name__ == "__main__":
    raise SystemExit(main())
