# The script that the monitor becomes. A trap can run at any moment, so traps share no state with the loop.
#
# In a trap, a plain `return` returns the status from before the trap. If SIGCHLD and another signal arrive together,
# only a `read` with a timeout is interrupted. SIGCHLD is blocked meanwhile, so children can remain zombies.
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
    # a process that is blocked in the kernel can take hours to end, and many monitors can wait at the same time:
        # so the pause grows
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
