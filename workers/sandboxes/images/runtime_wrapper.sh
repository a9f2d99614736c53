#!/bin/sh
# its own state is here and not in a home folder
folder=${WORK_FOLDER:-@OWN@}
# the blobs of registries, which builds share
blobs=${BLOBS:-@OWN@}
export HOME="$folder" APPTAINER_CONFIGDIR="$folder" APPTAINER_TMPDIR="$folder" APPTAINER_CACHEDIR="$blobs"
export TMPDIR="$folder" SINGULARITY_TMPDIR="$folder" SINGULARITY_CACHEDIR="$blobs"
umask 022
cd "$folder" || exit
exec @CONFINED@ "$folder" "$blobs" @USER@ @EXPOSURE@ @PROGRAM@ "$@"
