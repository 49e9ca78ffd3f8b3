"""An artifact as a Triton model repository, and as KServe's layout of one."""
