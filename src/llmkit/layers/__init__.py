"""What models are built from. Public: third-party models use the same layers."""
