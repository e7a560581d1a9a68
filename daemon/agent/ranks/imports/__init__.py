"""What zygotes import before a rank needs it: named modules, and those that ranks of this job have been seen to import.

`seen_imports`, `preloading`, `trial` and `import_lessons` are loaded in the user's interpreter.

May import: `daemon.host`.
"""
