"""One module per subcommand, imported when that subcommand is run; each holds a Typer app named `app`."""
