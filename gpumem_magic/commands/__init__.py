"""The subcommands of ``gpumem`` that read snapshot files: each module has `add_parser(subparsers)` and `run(options)`."""
