"""Support for settings and sequences of hdf5_corrupter (github.com/diepe28/hdf5_corrupter) on any checkpoint.

It is the injector of the checkpoint-alteration studies of Rojas, Meneses and others; read at 676c62a. Where its code and
its README differ, the code is followed, and a note on screen says so.
"""
