"""A decoder of Hugging Face transformers as a model of llmkit.

Its own code runs, on a flat batch; attention goes to llmkit's backend through transformers' attention interface, linear
layers through the kernel table and the quantization. `probe` finds out on the meta device what its attention layers
are; what cannot be had this way is refused by name.
"""
