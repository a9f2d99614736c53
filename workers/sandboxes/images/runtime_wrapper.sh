#!/bin/sh
# its own state is here and not in a home folder
place=${PLACE:-@OWN@}
# the blobs of registries, which builds share
blobs=${BLOBS:-@OWN@}
export HOME="$place" APPTAINER_CONFIGDIR="$place" APPTAINER_TMPDIR="$place" APPTAINER_CACHEDIR="$blobs"
export TMPDIR="$place" SINGULARITY_TMPDIR="$place" SINGULARITY_CACHEDIR="$blobs"
umask 022
cd "$place" || exit
exec @CONFINED@ "$place" "$blobs" @USER@ @EXPOSURE@ @PROGRAM@ "$@"
