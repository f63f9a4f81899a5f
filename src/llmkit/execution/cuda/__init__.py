"""Steps on a GPU: batch state on the device, launches that nobody waits for, decode steps as graph replays."""
