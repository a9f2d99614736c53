# The script that the monitor becomes. A trap may run at any moment, so none of them leaves anything to the loop.
#
# In a trap, `return` alone gives the status from before it. A signal that comes together with SIGCHLD interrupts only a
# `read` that has a time-out; SIGCHLD is blocked in that, so children may stay zombies.
lifeline=$1 silent=$2 builder=$3 first=$4 started=$5
lives() {
    local stat
    { read -r stat </proc/$first/stat; } 2>/dev/null || return 1
    set -- ${stat##*)}
    [[ ${20} == "$started" && $1 != [ZX] ]] && ! (($7 & 4))
}
holds() {
    local stat
    { read -r stat </proc/$builder/stat; } 2>/dev/null || return 1
    set -- ${stat##*)}
    [[ $1 != [ZX] && $2 == $$ ]]
}
finish() {
    trap '' USR1 URG
    lives && kill -KILL $first
    local n=0 pause=0.002
    # one that sleeps in the kernel may do so for hours
    # nor should many that end at the same time keep each other from it by asking
    while holds || lives; do
        read -rt $pause -u $silent
        case $((++n)) in 8) pause=0.02 ;; 100) pause=0.2 ;; esac
    done
    [[ -L cgroup ]] && rmdir -- "$(readlink cgroup)"
    cd -P .
    state=$PWD
    cd /
    exec unshare --user --map-root-user rm -rf --one-file-system -- "$state"
}
trap finish USR1
trap 'lives || finish' URG
trap : CHLD
trap '' TERM INT HUP
lives || finish
until read -rt 10 _ <&$lifeline; (($? == 1)); do lives || finish; done
finish
