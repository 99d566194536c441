"""The terminal's face: the subcommands of ``gpumem``. Each module has `add_parser(subparsers)` and `run(options)`."""
