"""Kernels of well-known libraries on a virtual GPU: what they return and allocate.

`bits` (bitsandbytes), `flash` (flash-attn), `efficient` (xformers) and `triton_kernels` hold the rules, each with its source;
`loading` puts them in force where the library is loaded already, or when the program imports it. Nothing here imports a library.
"""
