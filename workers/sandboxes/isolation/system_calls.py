"""System calls by number, in the groups that `seccomp.py` decides about. Standard library only.

Format: `name x86-64 aarch64`, with a dash if a machine does not have the call. A call of no group does not exist
inside. These are calls newer than this list, calls of other machines, and calls excluded on purpose:

* add_key, request_key, keyctl: keyrings are not separated by user namespaces, so the worker's keys could be read;
* clone3: a filter cannot read its flags, and C libraries fall back to clone;
* io_uring, userfaultfd, memfd_secret: large parts of the kernel behind few calls, and memory that is not counted;
* io_setup and related calls: their events are counted for the whole node (fs.aio-max-nr);
* pidfd_getfd, process_vm_readv, process_vm_writev, kcmp: access to other processes; ptrace can do the same.

The numbers are those of Linux 6.18: arch/x86/entry/syscalls/syscall_64.tbl and scripts/syscall.tbl. The choice follows
Docker's default profile (github.com/moby/profiles, seccomp/default.json).
"""

from __future__ import annotations

FILES = """
    read 0 63, write 1 64, open 2 -, openat 257 56, openat2 437 437, creat 85 -, close 3 57, close_range 436 436,
    statfs 137 43, fstatfs 138 44, lseek 8 62,
    pread64 17 67, pwrite64 18 68, readv 19 65, writev 20 66, preadv 295 69, pwritev 296 70, preadv2 327 286,
    pwritev2 328 287, access 21 -, faccessat 269 48, faccessat2 439 439, dup 32 23, dup2 33 -, dup3 292 24,
    fcntl 72 25, flock 73 32, fsync 74 82, fdatasync 75 83, sync 162 81, syncfs 306 267, sync_file_range 277 84,
    truncate 76 45, ftruncate 77 46, fallocate 285 47, fadvise64 221 223, readahead 187 213, sendfile 40 71,
    splice 275 76, tee 276 77, vmsplice 278 75, copy_file_range 326 285, getdents 78 -, getdents64 217 61,
    getcwd 79 17, chdir 80 49, fchdir 81 50, chroot 161 51, rename 82 -, renameat 264 38, renameat2 316 276,
    mkdir 83 -, mkdirat 258 34, rmdir 84 -, link 86 -, linkat 265 37, unlink 87 -, unlinkat 263 35, symlink 88 -,
    symlinkat 266 36, readlink 89 -, readlinkat 267 78, mknod 133 -, mknodat 259 33, chmod 90 -, fchmod 91 52,
    fchmodat 268 53, fchmodat2 452 452, umask 95 166, utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88,
    ioctl 16 29, cachestat 451 451, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, getxattr 191 8,
    lgetxattr 192 9, fgetxattr 193 10, listxattr 194 11, llistxattr 195 12, flistxattr 196 13, removexattr 197 14,
    lremovexattr 198 15, fremovexattr 199 16, setxattrat 463 463, getxattrat 464 464, listxattrat 465 465,
    removexattrat 466 466, inotify_init 253 -, inotify_init1 294 26, inotify_add_watch 254 27,
    inotify_rm_watch 255 28,
"""

STATUS = """
    stat 4 -, fstat 5 80, lstat 6 -, newfstatat 262 79, statx 332 291,
"""
"""Calls that return, among other things, the owner of a file."""

MEMORY = """
    brk 12 214, mmap 9 222, mprotect 10 226, munmap 11 215, mremap 25 216, msync 26 227, mincore 27 232,
    madvise 28 233, mlock 149 228, mlock2 325 284, munlock 150 229, mlockall 151 230, munlockall 152 231,
    memfd_create 319 279, membarrier 324 283, remap_file_pages 216 234, mseal 462 462, pkey_alloc 330 289,
    pkey_free 331 290, pkey_mprotect 329 288, map_shadow_stack 453 453, shmget 29 194, shmat 30 196, shmctl 31 195,
    shmdt 67 197, semget 64 190, semop 65 193, semctl 66 191, semtimedop 220 192, msgget 68 186, msgsnd 69 189,
    msgrcv 70 188, msgctl 71 187, mq_open 240 180, mq_unlink 241 181, mq_timedsend 242 182, mq_timedreceive 243 183,
    mq_notify 244 184, mq_getsetattr 245 185, process_mrelease 448 448,
"""

WAITING = """
    poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create 213 -, epoll_create1 291 20,
    epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, epoll_pwait2 441 441, eventfd 284 -, eventfd2 290 19,
    signalfd 282 -, signalfd4 289 74, pipe 22 -, pipe2 293 59, futex 202 98, futex_waitv 449 449,
    futex_wake 454 454, futex_wait 455 455, futex_requeue 456 456, set_robust_list 273 99, get_robust_list 274 100,
    nanosleep 35 101, clock_nanosleep 230 115, clock_gettime 228 113, clock_getres 229 114, gettimeofday 96 169,
    time 201 -, times 100 153, alarm 37 -, pause 34 -, getitimer 36 102, setitimer 38 103, timer_create 222 107,
    timer_settime 223 110, timer_gettime 224 108, timer_getoverrun 225 109, timer_delete 226 111,
    timerfd_create 283 85, timerfd_settime 286 86, timerfd_gettime 287 87,
"""

PROCESSES = """
    fork 57 -, vfork 58 -, execve 59 221, execveat 322 281, exit 60 93, exit_group 231 94, wait4 61 260,
    waitid 247 95, kill 62 129, tkill 200 130, tgkill 234 131, pidfd_open 434 434, pidfd_send_signal 424 424,
    rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigtimedwait 128 137,
    rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, rt_sigsuspend 130 133, sigaltstack 131 132,
    restart_syscall 219 128, rseq 334 293, set_tid_address 218 96, arch_prctl 158 -, prctl 157 167, seccomp 317 277,
    landlock_create_ruleset 444 444, landlock_add_rule 445 445, landlock_restrict_self 446 446, uretprobe 335 -,
    capget 125 90, capset 126 91, getpid 39 172, getppid 110 173, gettid 186 178, getpgrp 111 -, getpgid 121 155,
    setpgid 109 154, getsid 124 156, setsid 112 157, getrlimit 97 163, setrlimit 160 164,
    getrusage 98 165, getpriority 140 141, setpriority 141 140, ioprio_get 252 31, ioprio_set 251 30,
    sched_yield 24 124, sched_getaffinity 204 123, sched_setaffinity 203 122, sched_getparam 143 121,
    sched_setparam 142 118, sched_getscheduler 145 120, sched_setscheduler 144 119, sched_getattr 315 275,
    sched_setattr 314 274, sched_get_priority_max 146 125, sched_get_priority_min 147 126,
    sched_rr_get_interval 148 127, getcpu 309 168, uname 63 160, sysinfo 99 179, getrandom 318 278,
"""

SOCKETS = """
    bind 49 200, connect 42 203, listen 50 201, accept 43 202, accept4 288 242, shutdown 48 210, getsockname 51 204,
    getpeername 52 205, getsockopt 55 209, setsockopt 54 208, sendto 44 206, recvfrom 45 207, sendmsg 46 211,
    recvmsg 47 212, sendmmsg 307 269, recvmmsg 299 243,
"""

IDS = """
    getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177, getresuid 118 148, getresgid 120 150,
    getgroups 115 158,
"""
"""Queries of a process's users and groups."""

OWNERS = """
    chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54,
"""
"""Changes of owner. A rootless sandbox has one user, so they can only fail or seem to succeed."""

USERS = """
    setuid 105 146, setgid 106 144, setreuid 113 145, setregid 114 143, setresuid 117 147, setresgid 119 149,
    setgroups 116 159, setfsuid 122 151, setfsgid 123 152,
"""
"""Changes of user, as by `su` and installers that drop privileges. They too can only fail or seem to succeed."""

CHECKED = """
    clone 56 220, personality 135 92, prlimit64 302 261, ptrace 101 117, socket 41 198,
    socketpair 53 199,
"""
"""Allowed for some arguments."""

RIGHTS = """
    mount 165 40, umount2 166 39, pivot_root 155 41, open_tree 428 428, move_mount 429 429, fsopen 430 430,
    fsconfig 431 431, fsmount 432 432, fspick 433 433, mount_setattr 442 442, unshare 272 97, setns 308 268,
    sethostname 170 161, setdomainname 171 162, reboot 169 142, kexec_load 246 104, kexec_file_load 320 294,
    init_module 175 105, finit_module 313 273, delete_module 176 106, swapon 167 224, swapoff 168 225, acct 163 89,
    quotactl 179 60, quotactl_fd 443 443, syslog 103 116, settimeofday 164 170, clock_settime 227 112,
    adjtimex 159 171, clock_adjtime 305 266, iopl 172 -, ioperm 173 -, vhangup 153 58, bpf 321 280,
    perf_event_open 298 241, lookup_dcookie 212 18, fanotify_init 300 262, fanotify_mark 301 263,
    name_to_handle_at 303 264, open_by_handle_at 304 265, mbind 237 235, set_mempolicy 238 237,
    get_mempolicy 239 236, set_mempolicy_home_node 450 450, migrate_pages 256 238, move_pages 279 239,
"""
"""Calls that need a right that no process inside has; they fail with the kernel's own error."""

_MACHINES = ("x86_64", "aarch64")


def numbers(group: str, machine: str) -> dict[str, int]:
    """Return the calls of a group by name, without those that the machine does not have."""
    column = 1 + _MACHINES.index(machine)
    calls = (call.split() for call in group.replace("\n", " ").split(",") if call.strip())
    return {call[0]: int(call[column]) for call in calls if call[column] != "-"}
