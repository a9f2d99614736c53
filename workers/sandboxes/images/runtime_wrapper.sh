#!/bin/sh
# its bookkeeping goes here and not to a home folder
place=${PLACE:-@OWN@}
export HOME="$place" APPTAINER_CONFIGDIR="$place" APPTAINER_TMPDIR="$place" APPTAINER_CACHEDIR=@OWN@
export SINGULARITY_TMPDIR="$place" SINGULARITY_CACHEDIR=@OWN@
umask 022
cd "$place" || exit
@REACH@
exec @DROP@ --pdeathsig KILL @APART@ @PROGRAM@ "$@"
