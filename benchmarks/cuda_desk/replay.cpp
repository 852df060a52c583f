// Requests and releases from standard input, given to torch's own CUDA allocator: the peaks that it counts, in bytes.
//
// Each line is an index and a number of bytes: more than 0 asks for them, less gives back what the index has.
#include <c10/cuda/CUDACachingAllocator.h>
#if __has_include(<c10/cuda/PeerToPeerAccess.h>) // torch 2.10 has it elsewhere, and its allocator does without
#include <c10/cuda/PeerToPeerAccess.h>
#define PEERS
#endif

#include <cstdint>
#include <cstdio>
#include <unordered_map>

int main() {
    namespace allocator = c10::cuda::CUDACachingAllocator;
#ifdef PEERS
    c10::cuda::detail::init_p2p_access_cache(1);
#endif
    allocator::init(1);
    std::unordered_map<std::int64_t, void *> held;
    long long index = 0;
    long long change = 0;
    while (std::scanf("%lld %lld", &index, &change) == 2) {
        if (change > 0) {
            held[index] = allocator::raw_alloc_with_stream(change, nullptr);
        } else {
            allocator::raw_delete(held.at(index));
            held.erase(index);
        }
    }
    const auto counted = allocator::getDeviceStats(0);
    std::printf("%lld %lld\n", (long long)counted.allocated_bytes[0].peak, (long long)counted.reserved_bytes[0].peak);
    std::fflush(stdout);
    std::_Exit(0); // what is held is nothing
}
