"""Commands of this package, one per file."""

from scheduler_core.shell.threads import wait_without_spinning


def prepare_models() -> None:
    """Sets up the process before torch is imported: no spin-waiting threads, no progress bar while loading weights."""
    wait_without_spinning()
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
