/* See failpoint.h. */
#include "proto/base/failpoint.h"

#ifdef SHD_FAIL_POINTS
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ORDERS_MAX 16u
#define SEEN_MAX   128u

struct order {
    char name[64];
    _Atomic uint64_t left; /* passages until it is sent; 0: done */
    int signal;
};

void (*fail_point_hook)(const char *name);

static struct order orders[ORDERS_MAX];
static uint32_t order_count;
static bool listing;
static _Atomic pid_t reader; /* the process that read its orders: a fork reads its own */
static pthread_mutex_t reading = PTHREAD_MUTEX_INITIALIZER;

static void read_orders(void)
{
    const char *text = getenv("SHARDD_FAIL");
    order_count = 0;
    listing = text != NULL && strcmp(text, "list") == 0;
    while (text != NULL && *text != '\0' && order_count < ORDERS_MAX && !listing) {
        struct order *o = &orders[order_count++];
        const size_t bytes = strcspn(text, ",@!");
        snprintf(o->name, sizeof o->name, "%.*s", (int)bytes, text);
        text += bytes;
        uint64_t passages = 1;
        if (*text == '@') {
            char *end;
            passages = strtoull(text + 1, &end, 10);
            text = end;
        }
        o->signal = *text == '!' ? SIGSTOP : SIGKILL;
        text += *text == '!';
        atomic_store(&o->left, passages);
        text += *text == ',';
    }
}

static void read_orders_once(void)
{
    if (atomic_load(&reader) == getpid())
        return;
    pthread_mutex_lock(&reading);
    if (atomic_load(&reader) != getpid())
        read_orders();
    atomic_store(&reader, getpid());
    pthread_mutex_unlock(&reading);
}

/* A name is printed once in a process, as far as the table goes. */
static void say_once(const char *name)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static const char *seen[SEEN_MAX];
    static uint32_t count;
    pthread_mutex_lock(&lock);
    uint32_t i = 0;
    while (i < count && strcmp(seen[i], name) != 0)
        i++;
    if (i == count && count < SEEN_MAX) {
        seen[count++] = name;
        fprintf(stderr, "fail_point %s\n", name);
    }
    pthread_mutex_unlock(&lock);
}

void fail_point_hit(const char *name)
{
    if (fail_point_hook != NULL) {
        fail_point_hook(name);
        return;
    }
    read_orders_once();
    if (listing)
        say_once(name);
    for (uint32_t i = 0; i < order_count; i++) {
        struct order *o = &orders[i];
        if (strcmp(o->name, name) != 0 || atomic_load(&o->left) == 0)
            continue;
        if (atomic_fetch_sub(&o->left, 1) != 1)
            continue;
        kill(getpid(), o->signal);
        if (o->signal == SIGKILL)
            pause(); /* not one instruction further */
    }
}
#else
typedef int failpoint_not_compiled_in; /* ISO C wants something here */
#endif
