"""Transport through files in a shared directory or an object store (weights.transport=files).

    <weights.directory>/mcore_rl-<start of the run>/<connection>/shared                       checked by every process
                                                                /<buffer>/<transfer>.<sender>.<kind>.<round>
                                                                /<buffer>/complete/<transfer>.<sender>.json

Every message is one file. A transfer is one update, or the digests of one comparison; trainer ranks and engine ranks
count them alike. The manifest in `complete`, which is written last, lists size and digest of each file: readers take no
file that it does not list. One file serves all engines whose ranks keep the same slices.

Only the maxima of divided blocks (block_maxima.py) travel otherwise: trainer ranks exchange them over gloo.

Trainer ranks never wait for engines here. The driver starts the next transfer after all engines have acknowledged the
last one, so a writer may then remove its files of the transfer before.
"""
