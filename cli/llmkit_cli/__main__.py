"""`python -m llmkit_cli` is `llmkit`."""

from llmkit_cli.main import main

main()
