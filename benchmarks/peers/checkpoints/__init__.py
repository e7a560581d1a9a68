"""Other checkpoint libraries, each in a virtual environment of its own, for `make bench-checkpoint`.

`environments` makes the virtual environments. `library` starts the programs that run in them: `flash_checkpoint`
(DLRover) and `local_checkpoint` (NVRx) import none of Muster.
"""
