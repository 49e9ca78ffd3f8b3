"""How many threads linear algebra may use."""

from __future__ import annotations

from contextlib import AbstractContextManager


def one_blas_thread() -> AbstractContextManager[object]:
    """A context in which BLAS uses one thread.

    The optimiser calls BLAS with arrays of two numbers; on a busy machine handing those to threads that then wait for
    each other made a fit forty times slower.
    """
    import scipy.optimize  # noqa: F401  (its BLAS can only be limited once it is loaded)
    from threadpoolctl import threadpool_limits

    limits: AbstractContextManager[object] = threadpool_limits(limits=1, user_api="blas")
    return limits
