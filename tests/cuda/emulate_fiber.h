/* A stack of its own for each thread of a block, switched to and from by hand: swapcontext() makes
 * a system call each time. x86-64, as the host kernels are. AddressSanitizer is told; for
 * ThreadSanitizer, to which hundreds of fibers are hundreds of threads, what runs on them is
 * compiled without it. */
#ifndef SHD_TESTS_EMULATE_FIBER_H
#define SHD_TESTS_EMULATE_FIBER_H

#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

#include "proto/base/check.h"

#ifdef EMULATE_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#define FIBER_STACK_BYTES (size_t(128) << 10)
#define FIBER_GUARD_BYTES size_t(4096)

/* Save the callee's registers on the stack that *from_sp then holds, go on from to_sp. */
extern "C" void emulate_fiber_switch(void **from_sp, void *to_sp);
asm(R"(
    .text
    .globl emulate_fiber_switch
    .hidden emulate_fiber_switch
    .type emulate_fiber_switch, @function
emulate_fiber_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size emulate_fiber_switch, .-emulate_fiber_switch
)");

/* The caller's own stack, or one that fiber_start() made. What it was at when left is forgotten by
 * starting it again. */
struct fiber {
    void *sp;
    char *memory; /* NULL: the caller's own */
    const void *stack;
    size_t stack_bytes;
    void *fake_stack; /* of AddressSanitizer */
};

static inline void fiber_alloc(struct fiber *f)
{
    void *memory = mmap(nullptr, FIBER_STACK_BYTES, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(memory != MAP_FAILED);
    CHECK(mprotect(memory, FIBER_GUARD_BYTES, PROT_NONE) == 0);
    *f = fiber();
    f->memory = static_cast<char *>(memory);
    f->stack = f->memory + FIBER_GUARD_BYTES;
    f->stack_bytes = FIBER_STACK_BYTES - FIBER_GUARD_BYTES;
}

/* The next switch to f begins entry(), which never returns. */
static inline void fiber_start(struct fiber *f, void (*entry)())
{
#ifdef EMULATE_ASAN
    if (f->sp != nullptr) /* it may have been left anywhere */
        __asan_unpoison_memory_region(f->stack, f->stack_bytes);
#endif
    f->fake_stack = nullptr;
    void **top = reinterpret_cast<void **>(f->memory + FIBER_STACK_BYTES);
    *--top = nullptr; /* where entry's caller would be; entry is entered as if called */
    *--top = reinterpret_cast<void *>(entry);
    for (int i = 0; i < 6; i++)
        *--top = nullptr;
    f->sp = top;
}

#ifdef EMULATE_ASAN
/* The fiber that switched to the one that runs. Of all threads: one launch at a time. */
static struct fiber *fiber_before;
#endif

/* First thing a fiber does, and after each return from fiber_switch(). */
static inline void fiber_arrived(struct fiber *here)
{
#ifdef EMULATE_ASAN
    const void *stack;
    size_t bytes;
    __sanitizer_finish_switch_fiber(here->fake_stack, &stack, &bytes);
    if (fiber_before->memory == nullptr) {
        fiber_before->stack = stack;
        fiber_before->stack_bytes = bytes;
    }
#else
    (void)here;
#endif
}

static inline void fiber_switch(struct fiber *from, struct fiber *to)
{
    if (from == to)
        return;
#ifdef EMULATE_ASAN
    fiber_before = from;
    __sanitizer_start_switch_fiber(&from->fake_stack, to->stack, to->stack_bytes);
#endif
    emulate_fiber_switch(&from->sp, to->sp);
    fiber_arrived(from);
}

#endif
