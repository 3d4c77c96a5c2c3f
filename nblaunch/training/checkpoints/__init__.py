"""Checkpoints: whole or not at all.

contents.py  what one holds, and in which files
saving.py    collecting and writing, also in the background
folder.py    the folder: manifest, putting it into place, finding whole ones
loading.py   reading and comparing, then restoring
foreign.py   those that Accelerate wrote
keeper.py    an accelerator's own: names, hooks, registered objects
"""
