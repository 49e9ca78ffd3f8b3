from tests.predictors.conftest import artifact_folder  # noqa: F401
