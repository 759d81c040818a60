"""What to install for an engine."""


def needs(engine: str, extra: str, error: ImportError) -> ImportError:
    """The error that says so. Until a package index has fedbatchnorm, it is installed from its folder."""
    how = f"pip install 'PATH[{extra}]', where PATH is the folder of fedbatchnorm's source"
    return ImportError(f"this needs {engine} ({error}): {how}")
