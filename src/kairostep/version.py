"""The version, for files that must not import all of kairostep."""

__version__ = "0.1.0"
