"""Grammar engines for structured output, one module each."""
