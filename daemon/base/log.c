/* See log.h. */
#include "daemon/base/log.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "daemon/base/log_json.h"
#include "daemon/base/log_text.h"
#include "proto/base/clock.h"

#define BURST     20u
#define PERIOD_NS UINT64_C(5000000000)

static enum log_level level_max = LOG_LEVEL_INFO;
static bool as_json;
static const char *log_device = "";

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* guards the rest */
static struct log_entry entries[LOG_ENTRIES];
static uint64_t entries_ever, suppressed_ever;
static struct log_site *held; /* places that hold lines back, by next; borrowed: they are static */
static enum { UNKNOWN, JOURNAL, OTHER } stderr_kind;

void log_set_level(enum log_level level)
{
    level_max = level;
}

bool log_set_format(const char *format)
{
    as_json = strcmp(format, "json") == 0;
    return as_json || strcmp(format, "text") == 0;
}

void log_set_device(const char *device)
{
    log_device = device;
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

/* True: this place may say one more line in this period. */
static bool admit(struct log_site *site)
{
    const uint64_t now_ns = clock_now_ns();
    if (site->said == 0 || now_ns - site->since_ns > PERIOD_NS) {
        site->since_ns = now_ns;
        site->said = 0;
    }
    if (site->said < BURST) {
        site->said++;
        return true;
    }
    return false;
}

static void hold_back(struct log_site *site, enum log_level level, const char *text)
{
    suppressed_ever++;
    if (site->suppressed++ > 0)
        return;
    site->level = level;
    snprintf(site->op, sizeof site->op, "%.*s", (int)strcspn(text, " "), text);
    site->next = held;
    held = site;
}

/* Take out one place whose period is over (all: whatever its period). False: there is none. */
static bool take_held(bool all, enum log_level *ret_level, char *text, size_t bytes)
{
    const uint64_t now_ns = clock_now_ns();
    for (struct log_site **at = &held; *at != NULL; at = &(*at)->next) {
        struct log_site *site = *at;
        if (!all && now_ns - site->since_ns <= PERIOD_NS)
            continue;
        *at = site->next;
        *ret_level = site->level;
        snprintf(text, bytes, "%s suppressed=%u why=\"more than %u like it in %u s\"", site->op,
                 site->suppressed, BURST, (unsigned)(PERIOD_NS / NS_PER_S));
        site->suppressed = 0;
        return true;
    }
    return false;
}

static void keep(enum log_level level, const char *text)
{
    struct log_entry *entry = &entries[entries_ever++ % LOG_ENTRIES];
    entry->time_s = (double)clock_read_ns(CLOCK_REALTIME) * S_PER_NS;
    entry->level = level;
    snprintf(entry->text, sizeof entry->text, "%.*s", (int)sizeof entry->text - 1, text);
}

static void write_line(enum log_level level, const char *text, bool journal)
{
    char now[CLOCK_TEXT_BYTES], priority[8] = "";
    char *json = as_json ? log_json(clock_text(now), log_device, log_level_name(level), text)
                         : NULL;
    if (journal)
        snprintf(priority, sizeof priority, "<%d>", (int)level);
    /* A line is one write, so that lines of several processes do not mix. */
    if (json != NULL)
        fprintf(stderr, "%s%s\n", priority, json);
    else if (journal)
        fprintf(stderr, "%s%s\n", priority, text);
    else
        fprintf(stderr, "%s %s: %s\n", clock_text(now), log_level_name(level), text);
    free(json);
}

static bool journal_there(void)
{
    if (stderr_kind == UNKNOWN)
        stderr_kind = is_journal() ? JOURNAL : OTHER;
    return stderr_kind == JOURNAL;
}

void log_flush(bool all)
{
    char text[LOG_TEXT_BYTES];
    enum log_level level;
    for (;;) {
        pthread_mutex_lock(&mutex);
        const bool found = take_held(all, &level, text, sizeof text);
        const bool journal = journal_there();
        pthread_mutex_unlock(&mutex);
        if (!found)
            return;
        if (level <= level_max)
            write_line(level, text, journal);
    }
}

void log_at(struct log_site *site, enum log_level level, const char *fmt, ...)
{
    char text[1024];
    if (level > level_max && level > LOG_LEVEL_WARN)
        return;
    va_list ap;
    va_start(ap, fmt);
    log_text(text, sizeof text, fmt, ap);
    va_end(ap);
    log_flush(/* all= */ false);
    pthread_mutex_lock(&mutex);
    const bool admitted = admit(site);
    if (!admitted)
        hold_back(site, level, text);
    else if (level <= LOG_LEVEL_WARN)
        keep(level, text);
    const bool journal = journal_there();
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
