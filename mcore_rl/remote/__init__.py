"""Files that are not on this machine: the Hugging Face hub, and file systems with URLs.

hub             models and data sets on the hub, downloaded into its cache
file_systems    file systems of URLs, without configuration
shared_folder   files that processes of several hosts exchange
mirror          copies of folders
storage         files at URLs: downloads of data, uploads of exports
localize        replacement of remote names in a configuration by local paths
"""
