/* See log.h. */
#include "daemon/log.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define BURST     20u
#define PERIOD_NS UINT64_C(5000000000)
#define NS_PER_S  UINT64_C(1000000000)

static enum log_level level_max = LOG_LEVEL_INFO;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* guards the rest */
static struct log_entry entries[LOG_ENTRIES];
static uint64_t entries_ever, suppressed_ever;
static enum { UNKNOWN, JOURNAL, OTHER } stderr_kind;

void log_set_level(enum log_level level)
{
    level_max = level;
}

const char *log_level_name(enum log_level level)
{
    switch (level) {
    case LOG_LEVEL_ERROR:
        return "error";
    case LOG_LEVEL_WARN:
        return "warn";
    case LOG_LEVEL_INFO:
        return "info";
    case LOG_LEVEL_DEBUG:
        return "debug";
    }
    return "?";
}

enum log_level log_level_parse(const char *name)
{
    static const enum log_level levels[] = { LOG_LEVEL_ERROR, LOG_LEVEL_WARN, LOG_LEVEL_INFO,
                                             LOG_LEVEL_DEBUG };
    for (size_t i = 0; i < sizeof levels / sizeof levels[0]; i++)
        if (strcmp(name, log_level_name(levels[i])) == 0)
            return levels[i];
    return (enum log_level)0;
}

/* The variable is inherited by children whose stderr is something else: it names the journal's
 * device and inode, to be compared. */
static bool is_journal(void)
{
    const char *stream = getenv("JOURNAL_STREAM");
    unsigned long long device, inode;
    struct stat st;
    return stream != NULL && sscanf(stream, "%llu:%llu", &device, &inode) == 2 &&
           fstat(STDERR_FILENO, &st) == 0 && st.st_dev == device && st.st_ino == inode;
}

static uint64_t clock_ns(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
}

/* May this place say one more? *ret_suppressed: how many it did not say before. */
static bool admit(struct log_site *site, uint32_t *ret_suppressed)
{
    const uint64_t now_ns = clock_ns(CLOCK_MONOTONIC);
    *ret_suppressed = 0;
    if (site->said == 0 || now_ns - site->since_ns > PERIOD_NS) {
        site->since_ns = now_ns;
        site->said = 0;
        *ret_suppressed = site->suppressed;
        site->suppressed = 0;
    }
    if (site->said < BURST) {
        site->said++;
        return true;
    }
    site->suppressed++;
    suppressed_ever++;
    return false;
}

static void keep(enum log_level level, const char *text)
{
    struct log_entry *entry = &entries[entries_ever++ % LOG_ENTRIES];
    entry->time_s = (double)clock_ns(CLOCK_REALTIME) / (double)NS_PER_S;
    entry->level = level;
    snprintf(entry->text, sizeof entry->text, "%.*s", (int)sizeof entry->text - 1, text);
}

static void write_line(enum log_level level, const char *text, bool journal)
{
    /* One write: lines of several processes do not mix. */
    if (journal)
        fprintf(stderr, "<%d>%s\n", (int)level, text);
    else
        fprintf(stderr, "%s: %s\n", log_level_name(level), text);
}

void log_at(struct log_site *site, enum log_level level, const char *fmt, ...)
{
    char text[1024];
    uint32_t suppressed;
    if (level > level_max && level > LOG_LEVEL_WARN)
        return;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    pthread_mutex_lock(&mutex);
    const bool admitted = admit(site, &suppressed);
    const size_t used = strlen(text);
    if (suppressed > 0)
        snprintf(text + used, sizeof text - used, " suppressed=%u", suppressed);
    if (admitted && level <= LOG_LEVEL_WARN)
        keep(level, text);
    if (stderr_kind == UNKNOWN)
        stderr_kind = is_journal() ? JOURNAL : OTHER;
    const bool journal = stderr_kind == JOURNAL;
    pthread_mutex_unlock(&mutex);
    if (admitted && level <= level_max)
        write_line(level, text, journal); /* it may block; nobody else has to wait for that */
}

uint32_t log_recent(struct log_entry ret_entries[LOG_ENTRIES])
{
    pthread_mutex_lock(&mutex);
    const uint64_t first = entries_ever > LOG_ENTRIES ? entries_ever - LOG_ENTRIES : 0;
    const uint32_t count = (uint32_t)(entries_ever - first);
    for (uint32_t i = 0; i < count; i++)
        ret_entries[i] = entries[(first + i) % LOG_ENTRIES];
    pthread_mutex_unlock(&mutex);
    return count;
}

uint64_t log_suppressed(void)
{
    pthread_mutex_lock(&mutex);
    const uint64_t ever = suppressed_ever;
    pthread_mutex_unlock(&mutex);
    return ever;
}
