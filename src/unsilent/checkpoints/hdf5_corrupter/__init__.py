"""Files of hdf5_corrupter (github.com/diepe28/hdf5_corrupter), run on a checkpoint of any format: its settings, its sequences.

It is the injector of the checkpoint-alteration studies of Rojas, Meneses and others; read at 676c62a. Where its code and
its README differ, the code is followed, and a note on screen says so.
"""
