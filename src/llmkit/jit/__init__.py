"""What plugins with compiled kernels share. Importing it is cheap: numba is imported by `runtime.load`.

- `runtime`: compiling kernels (with a cache on disk), running them on torch's threads, scratch memory.
- `vector`: vector operations for use inside kernels, and emitters of LLVM instructions for new ones.
- `tiles`: register tiles of matrix products, and the product of a few rows with a weight.
- `rehearsal`: kernels of GPUs compiled side by side before a step launches them.
- `chain`, `device`, `float8`: for kernels in Triton: starting before the one ahead has ended, what a GPU has, 8-bit
  floating-point numbers.
- `few_rows`: products of a few rows with a weight, in Triton, and what stands before and behind them.
- `support`: why kernels cannot work on a machine, for front doors.

A kernel is a Python function `kernel(args)` of an int64 array, written with these operations. It takes pieces of work
from the counter `args[0]`, so that any number of threads can run it:

    from llmkit.jit import runtime
    from llmkit.jit import vector as ops

    def _double(args):                            # args: counter, source, target, rows of LANES elements
        size = 4 * ops.LANES                      # bytes of a vector
        while (row := ops.take(args, 0)) < args[3]:
            value = ops.vload(args[1] + size * row)
            ops.vstore(args[2] + size * row, ops.vadd(value, value))

    kernel = runtime.compile_kernel(_double)      # calls runtime.load first
    runtime.launch(kernel, 2, source.data_ptr(), target.data_ptr(), rows)

Compiled code holds module globals as constants: read `vector.LANES` and the like only after `runtime.load()`.
"""
