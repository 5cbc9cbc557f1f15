"""Commands that need more than one part of the library: arguments here, the work in modules imported when they run."""
