/* The other end of the socket, as fast as libzmq allows: a sender or a receiver in a process of its own.
 *
 *   peer LIBZMQ kind=push bind=tcp://127.0.0.1:* size=100 [count=N] [shape=plain] [rate=N] [hwm=1000] [nodrop=1]
 *
 * It loads the libzmq of pyzmq, so that both ends run the same one and no headers are needed. It first
 * prints its endpoint, then does what it reads, a word a line, and answers each with a line of JSON:
 *
 *   go       begin; a publisher waits for its first subscription
 *   mark     messages so far, and the time (seconds since the epoch)
 *   stop     send no more; the socket stays, so that what is queued still leaves; as mark
 *   latency  of the messages received since the last such word: p50 and p99 in microseconds
 *
 * At the end of its input it ends.
 */
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* zmq.h, as far as it is needed. */
enum { PULL = 7, PUSH = 8, SUB = 2, XPUB = 9 };
enum { SUBSCRIBE = 6, LINGER = 17, SNDHWM = 23, RCVHWM = 24, RCVTIMEO = 27, SNDTIMEO = 28, LAST_ENDPOINT = 32, XPUB_NODROP = 69 };
enum { SNDMORE = 2 };
typedef struct { _Alignas(void *) unsigned char bytes[64]; } zmq_msg_t;

static void *(*ctx_new)(void), *(*new_socket)(void *, int);
static int (*bind_to)(void *, const char *), (*connect_to)(void *, const char *);
static int (*set_option)(void *, int, const void *, size_t), (*get_option)(void *, int, void *, size_t *);
static int (*send_bytes)(void *, const void *, size_t, int), (*receive_bytes)(void *, void *, size_t, int);
static int (*msg_init)(zmq_msg_t *), (*msg_close)(zmq_msg_t *), (*msg_more)(const zmq_msg_t *);
static int (*msg_init_data)(zmq_msg_t *, void *, size_t, void (*)(void *, void *), void *);
static int (*msg_send)(zmq_msg_t *, void *, int), (*msg_recv)(zmq_msg_t *, void *, int);
static void *(*msg_data)(zmq_msg_t *);
static size_t (*msg_size)(const zmq_msg_t *);

#define COPIED 4096 /* from this size on libzmq is lent the payload, below it a copy is cheaper */
#define SAMPLES (1 << 22)
#define PUBLISHERS 8
#define TICK 1000000L /* ns between bursts of a paced sender */
#define LATE (4 * TICK) /* a sender later than this moves its schedule: it makes no burst of what it missed */

static const char *kind = "push", *bind_endpoint, *connect_endpoint, *shape = "plain";
static long size = 100, count, rate, hwm = 1000, nodrop = 1;
static void *sock;
static char *payload;
static atomic_long messages, samples;
static atomic_int stopped, done;
static uint64_t *latencies;

static void die(const char *what) {
    fprintf(stderr, "peer: %s: errno %d\n", what, errno);
    _exit(1);
}

static void *symbol(void *library, const char *name) {
    void *found = dlsym(library, name);
    if (!found) die(name);
    return found;
}

static void load(const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    if (!library) {
        fprintf(stderr, "peer: %s\n", dlerror());
        _exit(1);
    }
    ctx_new = symbol(library, "zmq_ctx_new");
    new_socket = symbol(library, "zmq_socket");
    bind_to = symbol(library, "zmq_bind");
    connect_to = symbol(library, "zmq_connect");
    set_option = symbol(library, "zmq_setsockopt");
    get_option = symbol(library, "zmq_getsockopt");
    send_bytes = symbol(library, "zmq_send");
    receive_bytes = symbol(library, "zmq_recv");
    msg_init = symbol(library, "zmq_msg_init");
    msg_close = symbol(library, "zmq_msg_close");
    msg_more = symbol(library, "zmq_msg_more");
    msg_init_data = symbol(library, "zmq_msg_init_data");
    msg_send = symbol(library, "zmq_msg_send");
    msg_recv = symbol(library, "zmq_msg_recv");
    msg_data = symbol(library, "zmq_msg_data");
    msg_size = symbol(library, "zmq_msg_size");
}

static uint64_t nanoseconds(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int is(const char *text, const char *other) { return !strcmp(text, other); }

/* Sending. What cannot leave is tried again until it is told to stop. */

static int again(void) {
    if (errno != EAGAIN && errno != EINTR) die("send");
    return !atomic_load(&stopped);
}

static int give(const void *data, size_t length, int flags) {
    while (send_bytes(sock, data, length, flags) < 0)
        if (!again()) return 0;
    return 1;
}

static void keep(void *data, void *hint) { (void)data, (void)hint; }

static int give_payload(void) {
    if (size < COPIED) return give(payload, (size_t)size, 0);
    zmq_msg_t message;
    msg_init_data(&message, payload, (size_t)size, keep, NULL);
    while (msg_send(&message, sock, 0) < 0)
        if (!again()) return 0;
    return 1;
}

static void big_endian(unsigned char *to, uint64_t number) {
    for (int i = 7; i >= 0; i--, number >>= 8) to[i] = (unsigned char)number;
}

static int send_one(uint64_t number) {
    unsigned char sequence[8];
    if (is(shape, "plain")) return give_payload();
    if (is(shape, "numbered")) { /* its own bytes, so copied at any size */
        big_endian((unsigned char *)payload, number);
        return give(payload, (size_t)size, 0);
    }
    if (!give("topic", 5, SNDMORE)) return 0;
    if (is(shape, "topic")) return give_payload();
    if (is(shape, "stamped")) {
        uint64_t now = nanoseconds(CLOCK_MONOTONIC);
        memcpy(payload, &now, sizeof now);
        return give(payload, (size_t)size, 0);
    }
    if (is(shape, "vllm")) {
        big_endian(sequence, number);
        return give(sequence, 8, SNDMORE) && give_payload();
    }
    if (is(shape, "sequenced")) {
        char name[] = "publisher-0";
        name[sizeof name - 2] += (char)(number % PUBLISHERS);
        big_endian(sequence, number / PUBLISHERS);
        return give(name, sizeof name - 1, SNDMORE) && give(sequence, 8, SNDMORE) && give_payload();
    }
    die("no such shape");
    return 0;
}

static void send_all(void) {
    if (is(kind, "pub")) {
        char subscription[256];
        while (receive_bytes(sock, subscription, sizeof subscription, 0) < 0)
            if (atomic_load(&stopped)) return;
    }
    uint64_t due = nanoseconds(CLOCK_MONOTONIC), number = 0;
    uint64_t step = !rate ? 0 : rate < 1000 ? 1000000000u / (uint64_t)rate : TICK;
    uint64_t burst = rate > 1000 ? (uint64_t)rate / 1000 : 1;
    while ((!count || number < (uint64_t)count) && !atomic_load_explicit(&stopped, memory_order_relaxed)) {
        if (step && number % burst == 0) {
            due += step;
            struct timespec until = {(time_t)(due / 1000000000u), (long)(due % 1000000000u)};
            clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
            uint64_t now = nanoseconds(CLOCK_MONOTONIC);
            if (now > due + LATE) due = now;
        }
        if (!send_one(number)) break;
        atomic_store_explicit(&messages, (long)++number, memory_order_relaxed);
    }
}

/* Receiving. */

static void receive_all(void) {
    long got = 0;
    int stamped = is(shape, "stamped");
    zmq_msg_t message;
    msg_init(&message);
    while (!atomic_load_explicit(&stopped, memory_order_relaxed)) {
        if (msg_recv(&message, sock, 0) < 0) {
            if (errno != EAGAIN && errno != EINTR) die("receive");
            continue;
        }
        if (msg_more(&message)) continue;
        if (stamped && msg_size(&message) >= 8) {
            uint64_t sent;
            memcpy(&sent, msg_data(&message), sizeof sent);
            long sample = atomic_load(&samples);
            if (sample < SAMPLES) {
                latencies[sample] = nanoseconds(CLOCK_MONOTONIC) - sent;
                atomic_store(&samples, sample + 1);
            }
        }
        atomic_store_explicit(&messages, ++got, memory_order_relaxed);
        if (count && got >= count) break;
    }
    msg_close(&message);
}

static int receives(void) { return is(kind, "pull") || is(kind, "sub"); }

static void *work(void *unused) {
    (void)unused;
    receives() ? receive_all() : send_all();
    atomic_store(&done, 1);
    return NULL;
}

/* Commands. */

static void mark(void) {
    printf("{\"messages\": %ld, \"time\": %.6f}\n", atomic_load(&messages), (double)nanoseconds(CLOCK_REALTIME) / 1e9);
}

static int ascending(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void latency(void) { /* the worker may add one meanwhile, which is forgotten */
    long n = atomic_load(&samples);
    if (n) qsort(latencies, (size_t)n, sizeof *latencies, ascending);
    printf("{\"p50\": %.1f, \"p99\": %.1f}\n", n ? (double)latencies[n / 2] / 1e3 : 0.0,
           n ? (double)latencies[n * 99 / 100] / 1e3 : 0.0);
    atomic_store(&samples, 0);
}

static void read_argument(char *argument) {
    char *value = strchr(argument, '=');
    if (!value) die(argument);
    *value++ = 0;
    if (is(argument, "kind")) kind = value;
    else if (is(argument, "bind")) bind_endpoint = value;
    else if (is(argument, "connect")) connect_endpoint = value;
    else if (is(argument, "shape")) shape = value;
    else if (is(argument, "size")) size = atol(value);
    else if (is(argument, "count")) count = atol(value);
    else if (is(argument, "rate")) rate = atol(value);
    else if (is(argument, "hwm")) hwm = atol(value);
    else if (is(argument, "nodrop")) nodrop = atol(value);
    else die(argument);
}

static void set_number(int option, int value) {
    if (set_option(sock, option, &value, sizeof value)) die("setsockopt");
}

static void open_socket(void) {
    int type = is(kind, "push") ? PUSH : is(kind, "pull") ? PULL : is(kind, "sub") ? SUB : is(kind, "pub") ? XPUB : -1;
    if (type < 0 || !(sock = new_socket(ctx_new(), type))) die("socket");
    set_number(SNDHWM, (int)hwm);
    set_number(RCVHWM, (int)hwm);
    set_number(SNDTIMEO, 100);
    set_number(RCVTIMEO, 100);
    set_number(LINGER, 0);
    if (type == XPUB) set_number(XPUB_NODROP, (int)nodrop); /* an XPUB is a PUB that tells of subscriptions */
    if (type == SUB && set_option(sock, SUBSCRIBE, "", 0)) die("subscribe");
    if (bind_endpoint ? bind_to(sock, bind_endpoint) : connect_to(sock, connect_endpoint)) die("endpoint");
    char endpoint[256];
    size_t length = sizeof endpoint;
    if (get_option(sock, LAST_ENDPOINT, endpoint, &length)) die("last endpoint");
    printf("{\"endpoint\": \"%s\"}\n", endpoint);
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc < 2) die("arguments");
    for (int i = 2; i < argc; i++) read_argument(argv[i]);
    if (size < 8 && (is(shape, "numbered") || is(shape, "stamped"))) die("size");
    if (!bind_endpoint && !connect_endpoint) die("endpoint");
    load(argv[1]);
    payload = malloc((size_t)size + 1);
    if (!payload) die("memory");
    memset(payload, 'x', (size_t)size);
    if (receives() && is(shape, "stamped") && !(latencies = malloc(SAMPLES * sizeof *latencies))) die("memory");
    open_socket();
    char line[64];
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        if (is(line, "latency")) {
            latency();
            continue;
        }
        if (is(line, "go")) {
            pthread_t worker;
            if (pthread_create(&worker, NULL, work, NULL)) die("thread");
            pthread_detach(worker);
        } else if (is(line, "stop")) {
            atomic_store(&stopped, 1);
            for (int i = 0; i < 5000 && !atomic_load(&done); i++) usleep(1000);
        }
        mark();
    }
    _exit(0);
}
