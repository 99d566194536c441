"""The terminal's face: the subcommands of ``gpumem``. Each is a module with `run(options)`; ``commands.json`` has the flags."""
