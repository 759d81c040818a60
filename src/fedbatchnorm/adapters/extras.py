"""What to install for an engine."""


def needs(engine: str, extra: str, error: ImportError) -> ImportError:
    """The error that says what to install: from the source folder, while no package index has it."""
    how = f"pip install 'PATH[{extra}]', where PATH is the folder of fedbatchnorm's source"
    return ImportError(f"this needs {engine} ({error}): {how}")
