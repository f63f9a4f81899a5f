"""What `llmkit bench` measures with: workloads, shapes, ceilings, timing."""
