// Records every system call that changes what is under one folder, and kills the process before the n-th of them.
//
// A seccomp filter traps these calls, whoever makes them: Python, torch, the C library within itself, safetensors, whose Rust calls the
// kernel directly. The handler of SIGSYS makes the call in their place and appends a record to the log. crash_begin(root, log) starts
// this for the calling thread and all threads and processes that it starts from then on; it cannot be undone. crash_arm(n) kills this
// process before its n-th change from now on; crash_mark(text) appends a mark.
//
// A record is a line of fields with tabs between them; the bytes that were written follow a `write`.
//     open pid fd flags path | close pid fd | write pid fd offset length | truncate pid fd length | fsync pid fd | map pid fd
//     mkdir path | rmdir path | unlink path | rename path path | exchange path path | mark text | unknown number
//
// `map` is a writable shared mapping and `unknown` a call whose effect is not recorded: a test asserts that there is none of them.
// Copies within the kernel and io_uring are refused with an error after which callers write instead.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <ucontext.h>
#include <unistd.h>

#if defined(__x86_64__)
#define ARCH AUDIT_ARCH_X86_64
#define ARGUMENT(c, n) ((long)(c)->uc_mcontext.gregs[(const int[]){REG_RDI, REG_RSI, REG_RDX, REG_R10, REG_R8, REG_R9}[n]])
#define RESULT(c) ((c)->uc_mcontext.gregs[REG_RAX])
extern long crash_call(long number, long a, long b, long c, long d, long e, long f);
extern const char crash_after_call[];
__asm__(
    ".text\n.globl crash_call\n.globl crash_after_call\n.hidden crash_after_call\ncrash_call:\n"
    "movq %rdi, %rax\nmovq %rsi, %rdi\nmovq %rdx, %rsi\nmovq %rcx, %rdx\nmovq %r8, %r10\nmovq %r9, %r8\nmovq 8(%rsp), %r9\n"
    "syscall\ncrash_after_call:\nret\n");
#elif defined(__aarch64__)
#define ARCH AUDIT_ARCH_AARCH64
#define ARGUMENT(c, n) ((long)(c)->uc_mcontext.regs[n])
#define RESULT(c) ((c)->uc_mcontext.regs[0])
extern long crash_call(long number, long a, long b, long c, long d, long e, long f);
extern const char crash_after_call[];
__asm__(
    ".text\n.globl crash_call\n.globl crash_after_call\n.hidden crash_after_call\ncrash_call:\n"
    "mov x8, x0\nmov x0, x1\nmov x1, x2\nmov x2, x3\nmov x3, x4\nmov x4, x5\nmov x5, x6\nsvc #0\ncrash_after_call:\nret\n");
#else
#error "no system calls are known for this processor"
#endif

#define FDS 65536
static char tracked[FDS];  // descriptors of what lies under the root
static char root[PATH_MAX];
static int log_fd = -1;
static long left;  // changes until the end; 0: none is set

static const int TRAPPED[] = {
#ifdef SYS_open
    SYS_open,   SYS_creat,  SYS_rename, SYS_unlink, SYS_rmdir,
    SYS_mkdir,  SYS_link,   SYS_symlink, SYS_dup2,
#endif
#ifdef SYS_renameat
    SYS_renameat,
#endif
    SYS_openat, SYS_openat2, SYS_close,     SYS_close_range, SYS_write,     SYS_pwrite64, SYS_writev,   SYS_pwritev,         SYS_pwritev2,
    SYS_fsync,  SYS_fdatasync, SYS_ftruncate, SYS_truncate,  SYS_fallocate, SYS_dup,      SYS_dup3,     SYS_copy_file_range, SYS_sendfile,
    SYS_splice, SYS_renameat2, SYS_linkat,    SYS_symlinkat, SYS_unlinkat,  SYS_mkdirat,  SYS_io_uring_setup,
};
#define COUNT (sizeof TRAPPED / sizeof *TRAPPED)

static void append(const char *line, const void *data, size_t length) {
    struct iovec parts[2] = {{(void *)line, strlen(line)}, {(void *)data, length}};
    if (crash_call(SYS_writev, log_fd, (long)parts, 2, 0, 0, 0) != (long)(parts[0].iov_len + length)) abort();
}

static void note(const char *format, ...) {
    char line[2 * PATH_MAX + 64];
    va_list values;
    va_start(values, format);
    vsnprintf(line, sizeof line, format, values);
    va_end(values);
    append(line, "", 0);
}

// The absolute path, or NULL where it is not under the root.
static const char *under(int dir, const char *path, char *out) {
    if (path[0] == '/') {
        if (snprintf(out, PATH_MAX, "%s", path) >= PATH_MAX) return NULL;
    } else {
        char link[64], base[PATH_MAX];
        snprintf(link, sizeof link, dir == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", dir);
        long n = crash_call(SYS_readlinkat, AT_FDCWD, (long)link, (long)base, sizeof base - 1, 0, 0);
        if (n < 0) return NULL;
        base[n] = 0;
        if (snprintf(out, PATH_MAX, "%s/%s", base, path) >= PATH_MAX) return NULL;
    }
    size_t n = strlen(root);
    return strncmp(out, root, n) == 0 && (out[n] == '/' || out[n] == 0) ? out : NULL;
}

static int is_tracked(long fd) { return fd >= 0 && fd < FDS && tracked[fd]; }

static void crash_point(void) {
    if (left && __sync_sub_and_fetch(&left, 1) == 0) {
        crash_call(SYS_kill, getpid(), SIGKILL, 0, 0, 0, 0);
        for (;;) pause();
    }
}

static long open_file(int dir, const char *path, long flags, long mode) {
    char place[PATH_MAX];
    const char *found = under(dir, path, place);
    if (found && (flags & (O_CREAT | O_TRUNC))) crash_point();
    long fd = crash_call(SYS_openat, dir, (long)path, flags, mode, 0, 0);
    if (fd >= 0 && fd < FDS) tracked[fd] = found != NULL;
    if (fd >= 0 && found) note("open\t%d\t%ld\t%ld\t%s\n", getpid(), fd, flags, found);
    return fd;
}

static long close_file(long fd) {
    if (is_tracked(fd)) {
        tracked[fd] = 0;
        note("close\t%d\t%ld\n", getpid(), fd);
    }
    return crash_call(SYS_close, fd, 0, 0, 0, 0, 0);
}

// `offset` is -1 where the file's own is meant.
static long write_file(long number, long fd, const struct iovec *parts, long count, long offset, const long *a) {
    if (!is_tracked(fd)) return crash_call(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    crash_point();
    long written = crash_call(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    if (written <= 0) return written;
    if (offset < 0) offset = crash_call(SYS_lseek, fd, 0, SEEK_CUR, 0, 0, 0) - written;
    char line[128], *data = malloc((size_t)written);
    size_t filled = 0, whole = (size_t)written;
    for (long i = 0; i < count && filled < whole; i++) {
        size_t n = parts[i].iov_len < whole - filled ? parts[i].iov_len : whole - filled;
        memcpy(data + filled, parts[i].iov_base, n);
        filled += n;
    }
    snprintf(line, sizeof line, "write\t%d\t%ld\t%ld\t%ld\n", getpid(), fd, offset, written);
    append(line, data, whole);
    free(data);
    return written;
}

static long on_file(long number, long fd, const char *what, const long *a) {
    if (is_tracked(fd)) crash_point();
    long result = crash_call(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    if (result < 0 || !is_tracked(fd)) return result;
    if (what[0] == 't') {
        note("truncate\t%d\t%ld\t%ld\n", getpid(), fd, number == SYS_ftruncate ? a[1] : crash_call(SYS_lseek, fd, 0, SEEK_END, 0, 0, 0));
    } else {
        note("%s\t%d\t%ld\n", what, getpid(), fd);
    }
    return result;
}

static long on_path(long number, int dir, const char *path, const char *what, const long *a) {
    char place[PATH_MAX];
    const char *found = under(dir, path, place);
    if (found) crash_point();
    long result = crash_call(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    if (result >= 0 && found) note("%s\t%s\n", what, found);
    return result;
}

static long on_two(long number, int old_dir, const char *old, int new_dir, const char *new, const char *what, const long *a) {
    char from[PATH_MAX], to[PATH_MAX];
    const char *source = under(old_dir, old, from), *target = under(new_dir, new, to);
    if (source || target) crash_point();
    long result = crash_call(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    if (result >= 0 && (source || target)) note("%s\t%s\t%s\n", what, from, to);
    return result;
}

static long unknown(long number, int is_seen, const long *a) {
    if (is_seen) note("unknown\t%ld\n", number);
    return crash_call(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

static long duplicate(long number, const long *a) {
    long fd = crash_call(number, a[0], a[1], a[2], 0, 0, 0);
    if (fd >= 0 && fd < FDS) tracked[fd] = 0;
    if (fd >= 0 && is_tracked(a[0])) note("unknown\t%ld\n", number);
    return fd;
}

static long made(long number, const long *a) {
    struct iovec one = {(void *)a[1], (size_t)a[2]};
    const struct iovec *many = (const struct iovec *)a[1];
    switch (number) {
#ifdef SYS_open
        case SYS_open: return open_file(AT_FDCWD, (const char *)a[0], a[1], a[2]);
        case SYS_creat: return open_file(AT_FDCWD, (const char *)a[0], O_CREAT | O_WRONLY | O_TRUNC, a[1]);
        case SYS_rename: return on_two(number, AT_FDCWD, (const char *)a[0], AT_FDCWD, (const char *)a[1], "rename", a);
        case SYS_unlink: return on_path(number, AT_FDCWD, (const char *)a[0], "unlink", a);
        case SYS_rmdir: return on_path(number, AT_FDCWD, (const char *)a[0], "rmdir", a);
        case SYS_mkdir: return on_path(number, AT_FDCWD, (const char *)a[0], "mkdir", a);
        case SYS_link: return on_two(number, AT_FDCWD, (const char *)a[0], AT_FDCWD, (const char *)a[1], "link", a);
        case SYS_symlink: return on_path(number, AT_FDCWD, (const char *)a[1], "symlink", a);
        case SYS_dup2: return duplicate(number, a);
#endif
#ifdef SYS_renameat
        case SYS_renameat: return on_two(number, (int)a[0], (const char *)a[1], (int)a[2], (const char *)a[3], "rename", a);
#endif
        case SYS_openat: return open_file((int)a[0], (const char *)a[1], a[2], a[3]);
        case SYS_close: return close_file(a[0]);
        case SYS_write: return write_file(number, a[0], &one, 1, -1, a);
        case SYS_pwrite64: return write_file(number, a[0], &one, 1, a[3], a);
        case SYS_writev: return write_file(number, a[0], many, a[2], -1, a);
        case SYS_pwritev:
        case SYS_pwritev2: return write_file(number, a[0], many, a[2], a[3], a);
        case SYS_fsync:
        case SYS_fdatasync: return on_file(number, a[0], "fsync", a);
        case SYS_ftruncate:
        case SYS_fallocate: return on_file(number, a[0], "truncate", a);
        case SYS_dup:
        case SYS_dup3: return duplicate(number, a);
        case SYS_copy_file_range: return -EXDEV;
        case SYS_sendfile:
        case SYS_splice: return -EINVAL;
        case SYS_io_uring_setup:
        case SYS_openat2:
        case SYS_close_range: return -ENOSYS;
        case SYS_renameat2: {
            const char *what = a[4] & 2 ? "exchange" : "rename";
            return on_two(number, (int)a[0], (const char *)a[1], (int)a[2], (const char *)a[3], what, a);
        }
        case SYS_linkat: return on_two(number, (int)a[0], (const char *)a[1], (int)a[2], (const char *)a[3], "link", a);
        case SYS_symlinkat: return on_path(number, (int)a[1], (const char *)a[2], "symlink", a);
        case SYS_unlinkat: return on_path(number, (int)a[0], (const char *)a[1], a[2] & AT_REMOVEDIR ? "rmdir" : "unlink", a);
        case SYS_mkdirat: return on_path(number, (int)a[0], (const char *)a[1], "mkdir", a);
        case SYS_mmap: {
            if (is_tracked(a[4])) note("map\t%d\t%ld\n", getpid(), a[4]);
            return crash_call(number, a[0], a[1], a[2], a[3], a[4], a[5]);
        }
        default: return unknown(number, 1, a);
    }
}

static void trapped(int signal, siginfo_t *info, void *context) {
    (void)signal;
    int kept = errno;
    ucontext_t *at = context;
    long a[6];
    for (int i = 0; i < 6; i++) a[i] = ARGUMENT(at, i);
    RESULT(at) = made(info->si_syscall, a);
    errno = kept;
}

#define FIELD(name) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, name))
#define HALF(name, n) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, name) + 4 * (n))

// 0, or the number of an error.
int crash_begin(const char *folder, const char *log) {
    snprintf(root, sizeof root, "%s", folder);
    log_fd = open(log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (log_fd < 0) return errno;
    struct sigaction action = {.sa_sigaction = trapped, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_RESTART};
    if (sigaction(SIGSYS, &action, NULL)) return errno;
    uint64_t ours = (uint64_t)(uintptr_t)crash_after_call;
    struct sock_filter program[2 * COUNT + 32];
    size_t n = 0;
#define ADD(...) program[n++] = (struct sock_filter)__VA_ARGS__
    ADD(FIELD(arch));
    ADD(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ARCH, 1, 0));
    ADD(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
    ADD(HALF(instruction_pointer, 0));
    ADD(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)ours, 0, 3));
    ADD(HALF(instruction_pointer, 1));
    ADD(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)(ours >> 32), 0, 1));
    ADD(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
    ADD(FIELD(nr));
    for (size_t i = 0; i < COUNT; i++) {
        ADD(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)TRAPPED[i], 0, 1));
        ADD(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP));
    }
    ADD(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mmap, 0, 5));  // shared and writable
    ADD(HALF(args[2], 0));
    ADD(BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, PROT_WRITE, 0, 3));
    ADD(HALF(args[3], 0));
    ADD(BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, MAP_SHARED, 0, 1));
    ADD(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP));
    ADD(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
    struct sock_fprog filter = {(unsigned short)n, program};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) return errno;
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) ? errno : 0;
}

void crash_arm(long n) { left = n; }
void crash_mark(const char *text) { note("mark\t%s\n", text); }
