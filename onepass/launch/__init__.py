"""How kernels are compiled, cached on disk and launched: one file a backend."""
