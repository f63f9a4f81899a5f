"""What plugin authors import: conformance suites, fakes, fixtures."""
